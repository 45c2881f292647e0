"""Subjects of checks: conversion of operators, pairs of functions and matrices to `Subject`."""
