"""Metrics, canonical gauge and geodesics of pairs of matrices, as pure batched tensor code that knows no model."""
