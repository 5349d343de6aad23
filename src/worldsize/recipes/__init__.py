"""Room: programs to copy, built on the public interface alone."""
