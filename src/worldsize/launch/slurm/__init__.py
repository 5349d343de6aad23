"""Room: Slurm: a job spec to a script, sbatch's answer to a job, squeue and sacct to what a person wants to know."""
