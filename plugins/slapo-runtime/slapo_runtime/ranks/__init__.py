"""The ranks of a mesh: messages between them, comparisons, and trials.

| file | the question that it answers |
|---|---|
| ``world.py`` | How do the ranks of a mesh exchange values and decide together? |
| ``facts.py``, ``checksums.py`` | Which fact or tensor differs between ranks? |
| ``consistency.py`` | Do the ranks agree before a build, and in the first steps? |
| ``exchange.py`` | How do some ranks along a mesh dimension send tensors to each other? |
| ``trial_groups.py`` | How do ranks survive a trial in which one of them fails? |
"""
