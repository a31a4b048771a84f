"""LoRA over packed linears: adapters through PEFT, their supported kinds, fused products in the update."""
