"""This process among the others: what the environment says, devices, process groups, agreement, random numbers, signals.

`env`, `hostlist`, `visible`, `network`, `signals`, `report` and `failure` import no torch: the launch half uses them.
"""
