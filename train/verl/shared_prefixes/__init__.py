"""What rollouts have in common is computed once: where they are sampled, and where they are trained.

The rollouts of a group share their prompt, the turns of a rollout begin alike, and so do all prompts about one
database. Sampled on any server and trained row by row on any GPU, most tokens would be computed many times.

- **Group**: the rollouts of one task. verl's name of it is the ``uid`` of its prompt, the part of a row's key before
  the first ``_``.
- **Prefix**: the first tokens of a prompt, in so far as other prompts begin with them, too. Hashes of prefixes of
  fixed lengths (:mod:`.prefixes`) travel with calls and rows: they say how much two prompts share.
- **Route**: the inference server of calls that begin alike, whose cache then has their prefix (:mod:`.routing`). Calls
  with one *key* have one route (:class:`.prefixes.RouteKeys`).
- **Balance**: the division of a step's rows among GPUs. Groups stay together, and groups that share a prefix, too, as
  long as all GPUs have as much to do (:mod:`.balance`).
- **Tree**: the rows of a micro-batch with each shared prefix once (:mod:`.tree`). A row is a path from the root, and
  attends to that path alone. verl's engine computes trees in place of rows (:mod:`.engine`).
"""
