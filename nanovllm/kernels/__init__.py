"""One operation per file: first a torch reference, then a Triton kernel, then a chooser."""
