"""Tables with rows in few bits, for models that only predict."""
