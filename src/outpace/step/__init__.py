"""One decoding step as functions of tensors in static buffers: nothing here waits for the host."""
