"""Parts of figures that several of them need."""
