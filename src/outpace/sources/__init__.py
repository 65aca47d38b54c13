"""What guesses. A source has state for several lanes, and functions of tensors that guess and learn."""
