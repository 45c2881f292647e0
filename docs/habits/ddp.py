"""Started by torchrun, on two workers."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(27, 8), torch.randn(27, 2))
net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
batches = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
adam = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(2):
    for x, t in batches:
        loss = nn.functional.mse_loss(net(x), t)
        adam.zero_grad()
        loss.backward()
        adam.step()
print(f"trained: {sum(p.abs().sum().item() for p in net.parameters()):.4f}")
torch.distributed.destroy_process_group()
