"""Operators in torch's autograd: conversion of tensors, order of calls, and the differentiable
function."""
