"""Whole models: conversion, memory format, fused groups and the backend of torch.compile."""
