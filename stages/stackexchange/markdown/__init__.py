"""Convert the HTML of posts to Markdown within limits."""
