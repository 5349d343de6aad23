"""One page about runs, made of what their folders hold: `reading` what happened, `health` what of it, `page` how it looks."""
