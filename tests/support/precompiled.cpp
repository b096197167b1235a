// The precompiled header needs one program to be built with.
int main() { return 0; }
