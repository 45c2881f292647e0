"""Agreement of workers on a layer's call, and the names of layers in errors."""
