"""Which live tensor is which reference tensor, and where each of them is.

A step may split a parameter, pack several into one, replace its module, or add a tensor of its own. State dicts,
checkpoints, initialization, ``verify`` and engines never ask which step did what. They ask this package about tensors:

*Reference tensor*
    A parameter or buffer of the model as its author wrote it, under its first name in registration order: a tie is one
    tensor with several keys in the state dict. :class:`~.reference.Survey` lists them, once, with shapes and dtypes.

*Live tensor*
    A parameter or buffer that the scheduled model holds now, on this rank: :class:`~.storage.LiveTensor`. Its layout
    says which rectangle of which reference tensor it is; the layout belongs to the tensor object, so that ties,
    aliases and moved modules need no bookkeeping.

*The correspondence*
    What explains a live tensor, one of four:

    1. its layout names a reference tensor of the layout's full shape: it is that tensor, or a shard of it;
    2. a plugin translates: ``slapo_to_reference`` and ``slapo_from_reference`` say what the full tensor stands for,
       e.g. one packed matrix for three reference tensors, in :class:`~.reference.Translations`;
    3. a step added it: it has no reference tensor, and is saved apart, under its own name;
    4. nothing does: it is unexplained, and everything here refuses the model with the declaration that is missing.
       So is a reference tensor that nothing stands for, unless a step dropped it.

Three things are kept apart, because they change independently:

- **which**: the correspondence above. It depends on the steps only, and is the same on every rank.
- **whose**: where a mesh has pipeline stages, the ranks along ``pp`` that hold a tensor (:class:`~.storage.Placement`).
  The others have a placeholder on the meta device, so that every rank's model keeps all names.
- **where**: a runtime may train main weights instead of the model's parameters: DTensors, flat tensors of its own,
  another precision, shards over the replicas. A :class:`~.storage.TensorStorage` and an
  :class:`~.storage.OptimizerStorage` read and write them by live tensor.

A value on its way to a file is thus read where it is kept, gathered by its layout, and translated to its reference
tensors; one on its way in goes back. :class:`~.state.ModelState` is that way, for state dicts and checkpoints, and the
one object of this package that an engine holds.

| file | the question that it answers |
|---|---|
| ``reference.py`` | Which tensors has the reference model? How does a plugin translate what no layout explains? |
| ``tensors.py`` | Which reference tensor is each live tensor? What is unexplained, added, dropped? |
| ``placement.py`` | Which ranks along ``pp`` hold which tensor? |
| ``storage.py`` | What is a live tensor, and how is a runtime asked for its main weights? |
| ``flat_storage.py`` | The same for a runtime that keeps parameters and optimizer state in flat tensors. |
| ``state.py`` | What are the model's values, under the reference names, and how do others get in? |
"""

from slapo_runtime.correspondence.placement import placed as placed, placement_facts as placement_facts
from slapo_runtime.correspondence.tensors import Correspondence as Correspondence, Unexplained as Unexplained
