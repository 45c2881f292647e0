"""Maps under test: conversion of operators, pairs of functions and matrices to `TestedMap`."""
