"""Pack documents and compute the language-modelling loss."""
