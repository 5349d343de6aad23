"""Room: what programs and tests need to try out several ranks, and failures, on one machine."""
