"""Templates of what is written into model cards; the cards of the demo models, made with them, stand beside."""
