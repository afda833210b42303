"""Whole models: conversion, memory format, tuning ahead, and the switch for a process."""
