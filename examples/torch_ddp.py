"""Train with torch's own DistributedDataParallel; the gradients travel through shared memory.

tessera run -n 2 -- python examples/torch_ddp.py
"""

import tessera  # noqa: F401  (registers the backend "shm")
import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("shm")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        x = torch.randn(64, 8)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks over {dist.get_backend()}: loss {loss.item():.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
