"""One start over several hosts that are reached by ssh or pdsh: `worldsize run --hosts a:4,b:4`."""
