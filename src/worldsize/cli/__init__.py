"""Room: the command line: one small file a command; arguments in, one call below, what to print. No torch."""
