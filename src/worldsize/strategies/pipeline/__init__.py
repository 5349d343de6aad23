"""Room: pipeline parallelism: a model in stages over ranks, under any schedule, from the same client code.

| file | knows |
|---|---|
| order | schedules: who computes what when, and when it is handed over |
| chain | where a model is cut, and what is left of it on a rank |
| measure | what the parts of a chain cost |
| shapes | what passes between stages, found without values |
| line | a rank's stages and its neighbours |
| halves | backward passes in two parts |
| ties | parameters that several stages share |
| passage | one turn's micro-batches on their way |
| flat | stages that are whole on their ranks |
| strategy | the interface to the loop |
"""
