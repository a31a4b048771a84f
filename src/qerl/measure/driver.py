"""What is asked of the driver, through nvidia-smi: of the GPU in use, and of no other of the machine.

nvidia-smi counts all GPUs of the machine. CUDA counts those that CUDA_VISIBLE_DEVICES leaves, in an order of
its own, so a number of the one means nothing to the other. Both know a GPU's place on the PCI bus, which is
also the same for a slice of it (MIG), where a UUID is not.
"""

from typing import Any

import torch


def nvidia_smi(fields: str) -> list[str]:
    """The command that prints fields of torch's present device as one line of numbers.

    Args:
        fields: As ``nvidia-smi --help-query-gpu`` names them, with commas between.

    Raises:
        RuntimeError: There is no CUDA device.
    """
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())  # torch's stub lacks its place
    place = f"{gpu.pci_domain_id:08X}:{gpu.pci_bus_id:02X}:{gpu.pci_device_id:02X}.0"
    return ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", f"--id={place}"]
