"""From a model id and a data set to what is scored: a model, fixed batches, and a loss."""
