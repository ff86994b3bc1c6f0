"""LSTM, GRU and RNN: whole sequences in one kernel."""
