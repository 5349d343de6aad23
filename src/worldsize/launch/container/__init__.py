"""Containers of a job: one description, rendered to the command line of each runtime.

What is rendered stands between srun and our node task, which runs inside the image. Slurm's own commands stay outside, in
the batch script (B005, B040).
"""
