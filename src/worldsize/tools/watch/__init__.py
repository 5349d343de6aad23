"""Looking on while a run trains, from any machine that sees its folder: `follow` reads it, `view` says it. No torch."""
