"""One process."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(27, 8), torch.randn(27, 2))
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
batches = DataLoader(data, batch_size=8)
adam = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(2):
    for x, t in batches:
        loss = nn.functional.mse_loss(net(x), t)
        adam.zero_grad()
        loss.backward()
        adam.step()
print(f"trained: {sum(p.abs().sum().item() for p in net.parameters()):.4f}")
