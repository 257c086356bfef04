"""The paper's experiments, by public names. ``import gaussnewton`` does not import them."""
