"""What the ranks of one engine say of a step's evictions, brought to the one that vLLM hears.

That is the first tensor-parallel rank of the last pipeline stage.
"""

from typing import Any

from vllm.distributed import get_pp_group, get_tp_group

from nexus_vllm.plan import StepReport


class Reports:
    """This rank's part in handing over reports.

    A report goes to the first rank of its stage, from there to the last stage. It is sent before
    the step's forward pass, in which the receiver waits for the sender anyway, so no pipeline
    stalls; a rank that is gone is noticed here.
    """

    def __init__(self) -> None:
        self._ranks, self._stages = get_tp_group(), get_pp_group()
        self._sent: Any = None

    @property
    def heard(self) -> bool:
        """Whether vLLM collects what this rank returns or raises."""
        return bool(self._ranks.is_first_rank and self._stages.is_last_rank)

    @property
    def alone(self) -> bool:
        """Whether this rank has nobody to hand anything to."""
        return bool(self._ranks.world_size == self._stages.world_size == 1)

    def gather(self, report: StepReport) -> StepReport | None:
        """All ranks' report, on the one that is heard. All ranks call this for the same steps.

        Reports that others will add to must be settled.
        """
        if self._sent is not None:
            self._sent.wait()
        if not self._ranks.is_first_rank:
            self._sent = self._ranks.isend_object(report, 0)
            return None
        for rank in range(1, self._ranks.world_size):
            report.add(self._ranks.recv_object(rank))
        last = self._stages.world_size - 1
        if not self._stages.is_last_rank:
            self._sent = self._stages.isend_object(report, last)
            return None
        for stage in range(last):
            report.add(self._stages.recv_object(stage))
        return report
