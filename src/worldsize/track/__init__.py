"""Where numbers and events go. One file a tracker; none asks which rank it is: only one process is given a real one."""
