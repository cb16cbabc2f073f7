"""Build the tabs of the demo page: two models side by side, and blind; with the inputs that both read."""
