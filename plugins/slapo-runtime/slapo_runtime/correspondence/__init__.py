"""The correspondence of live tensors to reference tensors, their placement, and their storage.

A step may split a parameter, pack several into one, replace its module, or add a tensor. State dicts, checkpoints,
initialization, ``verify`` and engines do not depend on the steps, but on this package's view of the tensors:

*Reference tensor*
    A parameter or buffer of the reference model, under its first name in registration order: a tie is one tensor with
    several keys in the state dict. :class:`~.reference.Survey` lists them, once, with shapes and dtypes.

*Live tensor*
    A present parameter or buffer of the scheduled model, on this rank: :class:`~.storage.LiveTensor`. Its layout gives
    its rectangle of a reference tensor; the layout belongs to the tensor object, so that ties, aliases and moved
    modules need no bookkeeping.

*Correspondence*
    The explanation of a live tensor, one of four:

    1. by layout: it names a reference tensor of the layout's full shape, and the tensor is that one or a shard of it;
    2. by translation: a plugin's ``slapo_to_reference`` and ``slapo_from_reference`` convert the full tensor, e.g. one
       packed matrix to three reference tensors, in :class:`~.reference.Translations`;
    3. added: a step added it without a reference tensor, and it is saved apart, under its own name;
    4. unexplained: the model is refused, with the missing declaration. So it is for a reference tensor without a live
       tensor, unless a step dropped it.

Three questions are separate, because their answers change independently:

- **which**: the correspondence above. It depends on the steps only, and is the same on every rank.
- **whose**: on a mesh with pipeline stages, the ranks along ``pp`` that hold a tensor (:class:`~.storage.Placement`).
  The others have a placeholder on the meta device, so that every rank's model keeps all names.
- **where**: a runtime may train main weights instead of the model's parameters: DTensors, flat tensors of its own,
  another precision, shards over the replicas. A :class:`~.storage.TensorStorage` and an
  :class:`~.storage.OptimizerStorage` read and write them by live tensor.

A value is saved by reading its storage, gathering it by its layout, and translating it to its reference tensors; it is
loaded in reverse. :class:`slapo_runtime.state.ModelState` does so for state dicts and checkpoints of engines.

| file | the question that it answers |
|---|---|
| ``reference.py`` | Which tensors has the reference model? How does a plugin translate tensors without a layout? |
| ``tensors.py`` | Which reference tensor is each live tensor? Which tensors are unexplained, added, dropped? |
| ``placement.py`` | Which ranks along ``pp`` hold which tensor? |
| ``storage.py`` | How are live tensors described, and how does a runtime give its main weights? |
| ``flat_storage.py`` | The same for a runtime with parameters and optimizer state in flat tensors. |
"""

from slapo_runtime.correspondence.placement import placement_facts as placement_facts, placement_of as placement_of
from slapo_runtime.correspondence.tensors import Correspondence as Correspondence, Unexplained as Unexplained
