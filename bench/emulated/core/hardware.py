"""What devices can do by their data sheets, and what part of it programs get. Their calibrations are in calibration.py.

Achieved fractions. A10, A40: 0.76 of FLOP/s and of memory bandwidth. Source: Sarathi (Agrawal et al., arXiv:2308.16369), the times of LLaMA-13B on an
A6000, whose chip (GA102) is the A40's and the A10's: about 0.22 ms for a token of a prompt, 44 ms for the weights in a decode step, of 154.8 TFLOP/s
and 768 GB/s. A100, A800: 0.72 of FLOP/s (FlashAttention-2, Dao, 2023: 225 of 312 TFLOP/s, end to end), memory as on the others.

Checked: the sums are right. 2 · 13.0e9 FLOPs in 0.22 ms are 0.76 of 154.8 TFLOP/s (0.75 with the layers' weights alone, as steps.py counts), 26 GB in
44 ms are 0.77 of 768 GB/s (0.76 without the embedding), 225 of 312 is 0.72. Not checked: whether these two papers say so. Neither was at hand; of
Sarathi's only the abstract, which has this model on this device but no times. FlashAttention-2's number, if it is as cited, is of training with long
sequences: an upper bound for prompts. So take both fractions for plausible, not for verified. No other paper at hand gives a fraction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GB = 10**9


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device and its link to the host, per direction.

    flops: dense, 16 bits. *_share: what programs get of the data sheet's figure. lora_share: of flops, by the kernels that compute adapters over a
    prompt. step_s: fixed overhead of a step. request_s: what each request in it adds. load_setup_s: of a copy over the link. usable_share: of the
    memory, for everything.
    """

    name: str
    flops: float
    memory_bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    flops_share: float = 0.76
    memory_share: float = 0.76
    link_share: float = 0.3
    lora_share: float = 0.0133
    step_s: float = 0.0045
    request_s: float = 0.0
    load_setup_s: float = 0.0
    usable_share: float = 0.9  # Source: vLLM's default of gpu_memory_utilization.

    @property
    def achieved_flops(self) -> float:
        """FLOP/s that programs reach."""
        return self.flops * self.flops_share

    @property
    def achieved_bytes_per_s(self) -> float:
        """Memory bandwidth that programs reach."""
        return self.memory_bytes_per_s * self.memory_share

    @property
    def achieved_link_bytes_per_s(self) -> float:
        """Bandwidth of the link that copies reach, each way."""
        return self.link_bytes_per_s * self.link_share

    def with_memory(self, memory_bytes: int) -> Gpu:
        """Return the same device with another size of memory, as Chameleon §5.5 has it."""
        return replace(self, name=f"{self.name} {memory_bytes // GB} GB", memory_bytes=memory_bytes)


@dataclass(frozen=True, slots=True)
class AssistingHost:
    """The processors beside a device, as they help with adapters.

    Attributes:
        core_flops: of one core, 32 bits.
        flops_share: the part of it that a product of few rows with a matrix reaches.
        tokens_per_core: tokens of a prompt that one core takes.
        call_s: seconds that calling the processors adds to a step.
    """

    name: str
    core_flops: float
    num_cores: int
    flops_share: float
    tokens_per_core: int
    call_s: float

    @property
    def achieved_core_flops(self) -> float:
        """FLOP/s that a product of few rows reaches on one core."""
        return self.core_flops * self.flops_share


# AMD's EPYC 7R32 of AWS's g5 (CaraServe §8): two units of eight lanes for multiply-adds at 3.3 GHz; of g5.48xlarge's 96 cores, each of the eight A10
# has 12. Half of the peak: chosen. 16 tokens: CaraServe, Fig. 17. Calling takes less than 1 ms: CaraServe §1.
EPYC_7R32 = AssistingHost("EPYC 7R32", 105.6e9, 12, 0.5, 16, 0.001)
# AMD's EPYC 9454 (Chameleon §5.1): 48 cores, 2.75 GHz with all at work, and two units of eight lanes for multiply-adds. The rest as above.
EPYC_9454 = AssistingHost("EPYC 9454", 88e9, 48, 0.5, 16, 0.001)

# PCIe 4.0 x16 moves 31.5 GB/s each way (16 GT/s, 128b/130b).
_A10 = Gpu("A10", 125e12, 600e9, 24 * GB, 31.5e9)
_A40 = Gpu("A40", 149.7e12, 696e9, 48 * GB, 31.5e9)
_A100 = Gpu("A100", 312e12, 2039e9, 80 * GB, 31.5e9, flops_share=0.72)
# The A100's chip and memory on a PCIe card; only NVLink is slower.
_A800 = Gpu("A800", 312e12, 1935e9, 80 * GB, 31.5e9, flops_share=0.72)
