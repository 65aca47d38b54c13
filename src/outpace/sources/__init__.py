"""Sources of draft tokens. A source holds the state of all lanes, and proposes and learns with tensor functions."""
