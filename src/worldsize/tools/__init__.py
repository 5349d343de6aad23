"""Tools around a training: proofs on the user's own program. They start programs through `launch` and read run folders."""
