"""One step of decoding as functions of tensors in fixed places: nothing here asks the host for anything."""
