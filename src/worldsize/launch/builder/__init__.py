"""A script builder's slurm_config.yaml, under its users' names, made into job specs: `sweep.drafts(BuilderConfig.of(...))`."""
