"""Functions as jobs: `@ws.job` wraps one, `main[config](args)` hands the call over, and a `Job` brings back what came of it.

    @ws.job
    def main(lr): ...

    job = main[ws.SlurmConfig(mode="slurm", num_of_node=2, tasks_per_node=4)](3e-4)
    job.result()    # rank 0's value, or the exception of the rank that failed first
    job.results()   # every rank's

The call travels as a pickle in the job's own folder, and what comes back does too: both are loaded only where nobody else can
write.
"""
