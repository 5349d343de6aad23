"""Room: the program that does nothing, for measuring how long it takes to get here."""

print("here", flush=True)
