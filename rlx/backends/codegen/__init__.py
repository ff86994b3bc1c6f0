"""What any code generator needs: kernel arguments, the table of phases, control flow over it, launch geometry."""
