// Empty: the target needs a file to be compiled with its header.
