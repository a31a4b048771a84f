"""LoRA over packed linears: PEFT's layers, what each kind computes, and the update's product."""
