"""A real Slurm cluster on this machine, for tests and for trying Slurm on a laptop.

    with Cluster(nodes=4, gpus=4) as cluster:
        print(cluster.run(["srun", "-N2", "hostname"]).out)
        cluster.kill("node2")   # a power cut

As root on Linux every node has its own address, name, processes, /run and /dev/shm (namespaces); elsewhere all share
this machine's loopback. `python -m worldsize.testing.slurm` is the same from a shell.
"""

from worldsize.testing.slurm.cluster import Cluster

__all__ = ["Cluster"]
