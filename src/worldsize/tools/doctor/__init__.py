"""What is wrong with the hosts before a training begins, or why it is slow: `worldsize doctor`.

One process of ours runs on every host, started by the launchers that there are, and does what the doctor asks of it over
one connection to a numeric address: no name, shared folder or torch has to work for that. What is measured goes to
judges that are pure functions; each finding says what was measured, what was expected, and what to do.
"""
