"""The page of `make demo`: what is shown, and what a click does. The only room that knows Gradio."""
