"""Room: how processes start, here and elsewhere. No torch, and nothing about models.

`local.run(plan)` starts the ranks of this node and answers with an exit code; `spawn(fn, nproc)` does the same for a
function. One supervisor a node watches its ranks (`supervisor`), several nodes meet at one endpoint (`rendezvous`;
`elastic` where they come and go), and whatever failed first is said once (`failure`).
"""
