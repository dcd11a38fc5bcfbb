"""What a model computes: one forward pass, its linear maps and softmaxes, and what each tensor is made of."""
