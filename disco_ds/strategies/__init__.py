"""How model, optimizer and gradients are spread over ranks: one Strategy each."""
